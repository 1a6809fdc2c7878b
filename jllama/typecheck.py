"""Checks of every call into jllama against its annotations, shapes included.

``JLLAMA_CHECK_SHAPES=1`` turns them on.
"""

import jaxtyping

try:
    import beartype
except ModuleNotFoundError:
    raise ImportError(
        "JLLAMA_CHECK_SHAPES=1 checks with beartype, which is missing: pip install beartype"
    ) from None

# With PEP 484's tower an int is a float: configurations have ``rope_theta=500000``.
typechecker = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
jaxtyping.install_import_hook("jllama", "jllama.typecheck.typechecker")
