"""Dead letters for people: searching the catalog, planning a replay, carrying it out."""

from towpath.deadletters.catalog import Catalog
from towpath.deadletters.criteria import Filter
from towpath.deadletters.plan import Plan, make_plan
from towpath.deadletters.replay import Action, Counts, carry_out

__all__ = ["Action", "Catalog", "Counts", "Filter", "Plan", "carry_out", "make_plan"]
