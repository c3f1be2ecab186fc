"""Turns on the checking of shapes and types in every annotated function of the package."""

from jaxtyping import install_import_hook

# Before anything else imports the package: only modules imported under the hook are checked.
install_import_hook("lockstep", "beartype.beartype")
