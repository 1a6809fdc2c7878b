"""With ``JLLAMA_CHECK_SHAPES=1``, every call into jllama is held against its annotations, shapes and all."""

import jaxtyping

try:
    import beartype
except ModuleNotFoundError:
    raise ImportError(
        "JLLAMA_CHECK_SHAPES=1 checks with beartype, which is missing: pip install beartype"
    ) from None

# An int is good where a float is asked for, as PEP 484 has it: configurations hold ``rope_theta=500000``.
typechecker = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
jaxtyping.install_import_hook("jllama", "jllama.typecheck.typechecker")
