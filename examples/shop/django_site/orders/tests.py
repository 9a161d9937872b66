"""`manage.py test`: the test database has both schemas, and what is written there goes with the test."""

from django.db import connection
from django.test import TestCase

from examples.shop.django_site.orders.models import Order
from examples.shop.django_site.orders.views import place_order


def rows(query: str) -> list[tuple[object, ...]]:
    """What a query answers."""
    with connection.cursor() as cursor:
        cursor.execute(query)
        found: list[tuple[object, ...]] = cursor.fetchall()
        return found


class Placing(TestCase):  # type: ignore[misc]
    """What a transaction of the service writes."""

    def test_an_order_comes_with_its_event_and_its_task(self) -> None:
        """All three, in the test's own transaction."""
        charge = place_order("t-1", 3)
        sent = rows("select kind, type, key from towpath.outbox order by id")
        assert sent == [("event", "order.placed", "t-1"), ("task", "payment.charge", "t-1")]
        assert rows("select id::text, state from towpath.task") == [(charge, "ACCEPTED")]
        assert Order.objects.count() == 1

    def test_nothing_of_another_test_is_left(self) -> None:
        """Whichever of the two runs first."""
        assert rows("select from towpath.outbox") == rows("select from towpath.task") == []
        place_order("t-2", 3)
