"""A Django project with one app; `python -m examples.shop.django_site` is its manage.py."""
