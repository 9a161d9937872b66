"""What an upgrade may do while the version before it runs: add."""

from alembic import context, op

from towpath.store.statements import in_schema

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_STATEMENTS = (
    "alter table towpath.outbox add column note text",
    "alter table towpath.task add column note text not null default ''",
    "alter table towpath.dead_letter add column note text",
    "alter table towpath.journal add column note text",
    "alter table towpath.worker add column note text",
    "alter table towpath.shard_lease add column note text",
    "create table towpath.extra (id bigint generated always as identity primary key)",
    "create index task_note on towpath.task (note) where note <> ''",
    "update towpath.meta set value = '2' where name = 'schema_version'",
)


def upgrade() -> None:
    for statement in _STATEMENTS:
        op.execute(in_schema(statement, context.config.attributes["schema"]))
