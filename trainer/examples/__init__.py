"""Two training scripts to run, read and copy from: bytes_gpt, a language model, and digits_cnn, an image classifier."""
