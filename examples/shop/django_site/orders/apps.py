"""Brings towpath's schema along with Django's migrations."""

from typing import Any

from django.apps import AppConfig
from django.db.models.signals import pre_migrate

from examples.shop.django_site.orders.database import url
from towpath.store import migrate


def upgrade_towpath(**_: Any) -> None:
    """Before Django's own migrations, which may then call towpath's functions; twice changes nothing."""
    migrate.upgrade(url())


class OrdersConfig(AppConfig):  # type: ignore[misc]
    """`manage.py migrate`, and Django's test runner, run `towpath db upgrade` first."""

    name = "examples.shop.django_site.orders"

    def ready(self) -> None:
        """Once for this app."""
        pre_migrate.connect(upgrade_towpath, sender=self)
