"""Placing an order over HTTP."""

import json

from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from examples.shop.django_site.orders.models import Order
from examples.shop.messages import Charge, OrderPlaced
from towpath import emit, submit


def place_order(reference: str, amount: int) -> str:
    """The order, the event and the task, in the transaction that is open or in one of its own."""
    with transaction.atomic():
        Order.objects.create(reference=reference, amount=amount)
        emit(connection.connection, OrderPlaced(reference, amount))
        return str(submit(connection.connection, Charge(reference, amount)).id)


@csrf_exempt  # type: ignore[untyped-decorator]
@require_POST  # type: ignore[untyped-decorator]
def orders(request: HttpRequest) -> JsonResponse:
    """Answers behind the COMMIT."""
    order = json.loads(request.body)
    return JsonResponse({"charge": place_order(order["id"], order["amount"])}, status=201)
