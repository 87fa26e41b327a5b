"""The version of the installed package."""

from importlib import metadata

try:
    VERSION = metadata.version("responses-mw")
except metadata.PackageNotFoundError:  # run from source without installation
    VERSION = "unknown"
