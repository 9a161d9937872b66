"""One path."""

from django.urls import path

from examples.shop.django_site.orders.views import orders

urlpatterns = [path("orders", orders)]
