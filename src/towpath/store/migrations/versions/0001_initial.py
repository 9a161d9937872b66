"""The first schema."""

from towpath.store.migrations.scripts import execute_script

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Emit the tables, functions and views, then the comments on them."""
    execute_script("0001_initial.sql")
    execute_script("0001_comments.sql")
