"""From live torch objects to named leaves, and back in place. Knows nothing of storage."""
