"""What an upgrade may do when the version before the last does not run any more: take away."""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("alter table towpath.task drop column result_ref")
    op.execute("update towpath.meta set value = '3' where name = 'schema_version'")
    op.execute("update towpath.meta set value = '2' where name = 'compatible_from'")
