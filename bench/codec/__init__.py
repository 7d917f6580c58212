"""Every codec by itself, beside a copy and torch's own operations."""
