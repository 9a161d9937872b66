"""The table of orders."""

from django.db import migrations, models


class Migration(migrations.Migration):  # type: ignore[misc]
    """As `makemigrations` writes it."""

    initial = True
    dependencies: list[tuple[str, str]] = []  # noqa: RUF012
    operations = [  # noqa: RUF012
        migrations.CreateModel(
            name="Order",
            fields=[
                ("reference", models.TextField(primary_key=True, serialize=False)),
                ("amount", models.PositiveIntegerField()),
            ],
        ),
    ]
