"""The ledger partitioned by the day on which a request was received, so that old days go by dropping tables.

Revision: 0002
Follows: 0001

Postgres wants the partition key in every unique key. `received_at` is a fact of the request: its gateway takes it once,
every outcome of the request repeats it to the millisecond, and the accountant's `owner_lost` copies it. So (request_id,
attempt, received_at) is as unique as (request_id, attempt), and one row a request is final. No column is new: writers
of the release before go on writing.

Existing rows are copied in one transaction that holds the table: stop the accountants (outcomes wait on the bus), or
let them retry. 300,000 rows took 8 s on a busy machine of two cores, and as long on the way back. It needs room for a
second copy of the table until it commits. Days outside of the last 400 and the next 3 go to `attempts_default`, as do
all rows for whose day no partition exists.

Going back copies the rows into one table again, with the same lock: `alembic downgrade 0001` with
TOKENFLEET_POSTGRES_URL, all services of this version stopped first. Days that were dropped stay dropped.
"""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_DAY = "(received_at AT TIME ZONE 'UTC')::date"


def upgrade() -> None:
    op.execute("LOCK TABLE attempts IN ACCESS EXCLUSIVE MODE")
    op.execute("ALTER TABLE attempts RENAME TO attempts_unpartitioned")
    op.execute(
        "CREATE TABLE attempts (LIKE attempts_unpartitioned INCLUDING DEFAULTS) PARTITION BY RANGE (received_at)"
    )
    op.execute("CREATE TABLE attempts_default PARTITION OF attempts DEFAULT")
    op.execute(
        f"""
        DO $$
        DECLARE day date;
        BEGIN
            FOR day IN
                SELECT DISTINCT {_DAY} FROM attempts_unpartitioned
                WHERE received_at BETWEEN now() - interval '400 days' AND now() + interval '3 days'
            LOOP
                EXECUTE format(
                    'CREATE TABLE %I PARTITION OF attempts FOR VALUES FROM (%L) TO (%L)',
                    'attempts_' || to_char(day, 'YYYYMMDD'),
                    day::timestamp AT TIME ZONE 'UTC', (day + 1)::timestamp AT TIME ZONE 'UTC'
                );
            END LOOP;
        END $$
        """
    )
    op.execute("INSERT INTO attempts SELECT * FROM attempts_unpartitioned")
    op.execute("DROP TABLE attempts_unpartitioned")
    _keys("request_id, attempt, received_at", "request_id, received_at")


def downgrade() -> None:
    op.execute("LOCK TABLE attempts IN ACCESS EXCLUSIVE MODE")
    op.execute("ALTER TABLE attempts RENAME TO attempts_by_day")
    op.execute("CREATE TABLE attempts (LIKE attempts_by_day INCLUDING DEFAULTS)")
    op.execute("INSERT INTO attempts SELECT * FROM attempts_by_day")
    op.execute("DROP TABLE attempts_by_day")
    _keys("request_id, attempt", "request_id")


def _keys(key: str, one_final: str) -> None:
    """After the rows, which is faster than with them."""
    op.execute(f"ALTER TABLE attempts ADD CONSTRAINT attempts_pkey PRIMARY KEY ({key})")
    op.execute(f"CREATE UNIQUE INDEX attempts_one_final ON attempts ({one_final}) WHERE final")
    op.execute("CREATE INDEX attempts_finished_at ON attempts (finished_at)")
