"""Arrays on devices and on the host: where they lie, the bytes they take, how they move."""
