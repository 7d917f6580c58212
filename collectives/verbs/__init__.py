"""The verbs, one family a file. Each checks its arguments, chooses the algorithm, describes the call, and submits a body.

The description is the same on all ranks and marks the operation's messages; the body runs when the operation's turn comes.
"""

from gradwire.collectives.verbs.objects import Objects
from gradwire.collectives.verbs.point_to_point import PointToPoint
from gradwire.collectives.verbs.shares import Halves


class Verbs(Halves, Objects, PointToPoint):
    """The methods that move tensors and objects between the ranks of a group."""
