"""What runs inside a task: the only part of Muster that touches TensorFlow, and never before the script does."""
