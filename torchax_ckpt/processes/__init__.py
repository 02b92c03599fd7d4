"""The coordination between the processes of a run, independent of the state that is saved."""
