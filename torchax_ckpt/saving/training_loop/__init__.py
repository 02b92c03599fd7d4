"""What the training loop says of its steps: its position, its metrics, and when it ends."""
