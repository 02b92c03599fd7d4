"""Takes snapshots of device arrays for saves, and moves arrays between hosts and devices."""
