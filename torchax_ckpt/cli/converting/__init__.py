"""Commands that write the weights of steps in other forms."""
