"""The control plane: who takes part, how ranks meet, and news of failures."""
