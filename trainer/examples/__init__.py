"""Two training scripts to run, read and copy: bytes_gpt, a language model, and digits_cnn, an image classifier."""

from importlib.util import find_spec

if missing := [package for package in ("matplotlib", "rich") if find_spec(package) is None]:
    raise ModuleNotFoundError(
        f"{' and '.join(missing)}, which the examples need, cannot be found: pip install '.[train]' in a clone of gradwire"
    )
