"""Dead letters for people: searching the catalog, planning a replay, carrying it out."""

from towpath.bulk import Counts
from towpath.deadletters.catalog import Catalog
from towpath.deadletters.criteria import Filter
from towpath.deadletters.plan import Action, Plan, make_plan
from towpath.deadletters.replay import carry_out

__all__ = ["Action", "Catalog", "Counts", "Filter", "Plan", "carry_out", "make_plan"]
