"""${message}"""

from towpath.store.migrations.scripts import execute_script

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    execute_script(f"{revision}_NAME.sql")
