"""What moves bytes between ranks, and who of them is there."""
