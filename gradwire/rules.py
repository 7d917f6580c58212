"""What the ranks exchange in training, and when: the objects that `rule=` of a DistributedOptimizer takes, as `hvd.rules`.

    optimizer = hvd.DistributedOptimizer(adamw, model.named_parameters(), rule=hvd.rules.Sharded())

An object such as Sharded(...) has the settings of a rule, and makes the rule itself, an object of a class derived from Rule, from
the arguments of the optimizer. Each rule is one file, built on gradwire.trainer.reducer. docs/extending.md shows how to write
one.
"""

from gradwire.trainer.rules.adasum import Adasum as Adasum
from gradwire.trainer.rules.local_report import LocalReport as LocalReport
from gradwire.trainer.rules.local_steps import LocalUpdates as LocalUpdates
from gradwire.trainer.rules.next_forward import NextForward as NextForward
from gradwire.trainer.rules.rule import Rule as Rule
from gradwire.trainer.rules.sharded import Sharded as Sharded
