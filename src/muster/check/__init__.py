"""Is every machine fit, and can every task reach every task that it needs?

``probe`` and ``pairs`` are sent to the hosts and run there (``serve`` is their loop, ``program`` the text that is
sent); ``survey`` asks all hosts through channels that somebody else opens; ``verdicts`` judges what they answered,
without I/O; ``render`` shows it. Nothing is imported here: this package travels too, and a host needs two of its
modules at most.
"""
