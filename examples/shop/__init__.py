"""One shop, three ways to produce: FastAPI, Django, and any language that speaks SQL; one group consumes.

| module | role |
|---|---|
| `messages` | what is said: an event and a task |
| `fastapi_app` | a transaction for each request, from a dependency |
| `django_site` | `transaction.atomic`, `manage.py towpath`, `manage.py migrate`, `manage.py test` |
| `place_order.sql` | psql, for every language without a client of ours |
| `billing` | the consumer group |
"""
