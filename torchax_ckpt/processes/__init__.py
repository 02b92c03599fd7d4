"""How the processes of a run coordinate, independent of the state that they train."""
