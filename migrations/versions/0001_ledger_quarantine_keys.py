"""The ledger, its quarantine, and API keys.

Revision: 0001
Follows: nothing

The ledger is one table. It may be partitioned by day later: `received_at` is a fact of the request, the same in every
row and repeat of it, so (request_id, attempt, received_at) is as unique as (request_id, attempt).
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False)


def _count(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=nullable)


def _flag(name: str) -> sa.Column[bool]:
    return sa.Column(name, sa.Boolean, nullable=False)


def _ms(name: str, *, nullable: bool = True) -> sa.Column[float]:
    return sa.Column(name, sa.Double, nullable=nullable)


def upgrade() -> None:
    op.create_table(
        "attempts",
        _text("request_id"),
        sa.Column("attempt", sa.Integer, nullable=False),
        _flag("final"),
        _text("outcome"),
        _text("reason"),
        sa.Column("status", sa.Integer, nullable=False),
        _text("tenant"),
        _text("service_class"),
        _text("task"),
        _text("model_asked"),
        _text("model"),
        _text("version"),
        _text("model_served"),
        _text("site"),
        _text("served_site"),
        _text("instance"),
        _text("booking"),
        _flag("stream"),
        _flag("fallback"),
        _count("input_tokens"),
        _count("output_tokens"),
        _count("offered_output_tokens", nullable=True),
        _flag("offered_estimated"),
        _count("output_budget_tokens", nullable=True),
        _count("cached_tokens", nullable=True),
        _count("prefix_hit_tokens_predicted"),
        _text("usage_source"),
        _count("request_bytes"),
        _count("response_bytes"),
        sa.Column("received_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        _ms("queue_ms"),
        _ms("first_byte_ms"),
        _ms("ttft_ms"),
        _ms("tpot_ms"),
        _ms("e2e_ms", nullable=False),
        _ms("predicted_ttft_ms"),
        _ms("predicted_tpot_ms"),
        _ms("ttft_objective_ms"),
        _ms("tpot_objective_ms"),
        _ms("e2e_objective_ms"),
        _text("finish_reason"),
        _flag("compliant"),
        _text("missed"),
        _count("wasted_tokens"),
        _text("wasted_cause"),
        _text("gateway"),
        _text("gateway_incarnation"),
        _text("event_id"),
        sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.PrimaryKeyConstraint("request_id", "attempt", name="attempts_pkey"),
    )
    op.create_index("attempts_one_final", "attempts", ["request_id"], unique=True, postgresql_where=sa.text("final"))
    op.create_index("attempts_finished_at", "attempts", ["finished_at"])
    op.create_table(
        "quarantine",
        sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("payload_hash", sa.LargeBinary, nullable=False),
        _text("subject"),
        _text("reason"),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        _flag("truncated"),
        sa.Column("quarantined_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.UniqueConstraint("payload_hash", name="quarantine_payload_hash_key"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("key_hash", sa.LargeBinary, nullable=False),
        _text("tenant"),
        sa.Column("classes", ARRAY(sa.Text)),
        sa.Column("label", sa.Text, nullable=False, server_default=""),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.UniqueConstraint("key_hash", name="api_keys_key_hash_key"),
    )


def downgrade() -> None:
    for table in ("api_keys", "quarantine", "attempts"):
        op.drop_table(table)
