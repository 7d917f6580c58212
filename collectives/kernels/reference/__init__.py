"""The codecs in plain torch, on any device."""
