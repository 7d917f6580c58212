"""What a key, and what checksums, cost the exchange between hosts."""
