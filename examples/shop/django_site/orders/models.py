"""An order, in a table that Django migrates."""

from django.db import models


class Order(models.Model):  # type: ignore[misc]  # Django has no types of its own
    """What was placed."""

    reference = models.TextField(primary_key=True)
    amount = models.PositiveIntegerField()
