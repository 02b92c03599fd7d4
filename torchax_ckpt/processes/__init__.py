"""How the processes of a run agree. Knows nothing of the state they train."""
