"""The least that runs, with the database of DATABASE_URL."""

import os
from urllib.parse import unquote, urlsplit

_url = urlsplit(os.environ["DATABASE_URL"])

SECRET_KEY = "for a machine of your own"
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "examples.shop.django_site.orders.urls"
INSTALLED_APPS = ["examples.shop.django_site.orders"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": _url.hostname,
        "PORT": _url.port,
        "USER": unquote(_url.username or ""),
        "PASSWORD": unquote(_url.password or ""),
        "NAME": _url.path.lstrip("/"),
    }
}
