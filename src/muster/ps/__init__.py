"""Our parameter servers: NumPy and sockets, no TensorFlow.

Nothing is imported here, so that ``python -m muster.ps`` can choose its settings before NumPy is loaded.
"""
