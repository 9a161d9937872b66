"""Misuses that both type checkers must reject, on the lines marked so; never run."""

from dataclasses import dataclass

from towpath import App, Call, Happened, OnceCall, Retry, Tx, Verdict, event


@event("shipping.requested", destination="shipping", key="order_id")
@dataclass(frozen=True)
class ShippingRequested:
    order_id: str


app = App("misuse")


@app.transactional()  # rejected: a transactional handler gets a Tx
async def takes_a_call(request: ShippingRequested, call: Call) -> None: ...


@app.transactional()  # rejected: Retry is raised, not returned
async def returns_retry(request: ShippingRequested, tx: Tx) -> Retry:
    return Retry()


@app.idempotent()  # rejected: Retry is raised, not returned
async def returns_retry_from_a_call(request: ShippingRequested, call: Call) -> Retry:
    return Retry()


@app.idempotent()
async def wants_a_session(request: ShippingRequested, call: Call) -> None:
    print(call.session)  # rejected: no transaction is open while a call runs


@app.at_most_once()  # rejected: there must be a way to find out what happened
async def has_no_reconcile(request: ShippingRequested, call: OnceCall) -> str:
    return "shipped"


async def finds_a_number(call: OnceCall) -> Verdict[int]:
    return Happened(7)


@app.at_most_once(reconcile=finds_a_number)  # rejected: the handler's result is a str
async def reconciles_to_another_type(request: ShippingRequested, call: OnceCall) -> str:
    return "shipped"
