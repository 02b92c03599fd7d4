"""What a restore will change, compared first and then carried out: for torchax and plain torch."""
