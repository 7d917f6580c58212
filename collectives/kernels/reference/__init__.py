"""The codecs in plain torch, on any device. `quantize` and `sparse` gather what the other files define."""
