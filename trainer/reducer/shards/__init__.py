"""A rank's shares of the parameters: the pieces that its optimizer steps, and their transfer to all ranks."""
