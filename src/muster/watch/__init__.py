"""Screens. They read events and state, and write nothing."""
