"""Arrays of every kind: validated on the way in, and returned as they came."""

from .arguments import *
from .places import *
