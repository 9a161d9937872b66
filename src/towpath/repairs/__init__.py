"""Tasks for people: what is stuck and why, and what is put back to work."""

from towpath.repairs.criteria import TaskFilter
from towpath.repairs.moving import carry_out
from towpath.repairs.plan import RepairPlan, make_plan

__all__ = ["RepairPlan", "TaskFilter", "carry_out", "make_plan"]
