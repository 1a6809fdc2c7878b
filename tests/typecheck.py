"""Named in conftest.py: what checks types at run time. It imports nothing of ours, as it is there before all else."""

import beartype

# An int is good where a float is asked for, as PEP 484 has it: configurations hold ``rope_theta=500000``.
typechecker = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
