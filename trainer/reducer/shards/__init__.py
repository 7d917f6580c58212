"""A rank's shards of the parameters: its optimizer steps them, and all ranks gather them."""
