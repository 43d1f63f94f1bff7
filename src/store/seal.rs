//! Secrets at rest: sealing anew what is stored as it was given, or under a key that is no longer the newest, and erasing
//! what no longer signs.

use super::{Store, StoreError};
use crate::domain::ids::SubscriptionId;
use crate::domain::seal::{SigningSecret, Unopened};

/// Subscriptions sealed anew, or rid of a former secret, by one transaction: publishing waits while it runs.
const BATCH: i64 = 100;

/// What signs the deliveries of a subscription now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Secrets {
    /// The secret in force.
    pub current: SigningSecret,
    /// The former one, while it signs as well.
    pub previous: Option<SigningSecret>,
}

/// How far sealing anew has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resealed {
    /// Subscriptions whose secrets were sealed anew.
    pub sealed: u64,
    /// Subscriptions with a secret that no key opens; it stays as it is.
    pub unopened: Vec<SubscriptionId>,
    /// Where to go on; `None` when all have been seen.
    pub next: Option<String>,
}

/// How far erasing has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Erased {
    /// Former secrets that are gone now.
    pub erased: u64,
    /// Whether there may be more.
    pub more: bool,
}

impl Store {
    /// Opens what a claim has read. A former secret that cannot be opened is done without: the one in force signs.
    pub(super) fn open_secrets(
        &self,
        subscription_id: &str,
        current: &str,
        previous: Option<&str>,
    ) -> Result<Secrets, Unopened> {
        let previous = previous.and_then(|stored| match self.sealer.open(stored, subscription_id) {
            Ok(secret) => Some(secret),
            Err(unopened) => {
                tracing::warn!(
                    %subscription_id, "the former secret of {subscription_id} does not sign: {unopened}"
                );
                None
            }
        });
        Ok(Secrets {
            current: self.sealer.open(current, subscription_id)?,
            previous,
        })
    }

    /// Seals with the newest key what is not yet, for a bounded number of subscriptions after `after`. A secret that was
    /// changed meanwhile is left to the change, which sealed it.
    pub async fn reseal(&self, after: &str) -> Result<Resealed, StoreError> {
        let mut done = Resealed {
            sealed: 0,
            unopened: Vec::new(),
            next: None,
        };
        let Some(prefix) = self.sealer.newest_prefix() else {
            return Ok(done);
        };
        let mut reader = self.own_reader().await?;
        let rows = sqlx::query!(
            r#"
            SELECT id, secret, previous_secret FROM subscriptions
            WHERE id > $1 AND (NOT starts_with(secret, $2) OR NOT starts_with(previous_secret, $2))
            ORDER BY id
            LIMIT $3
            "#,
            after,
            prefix,
            BATCH,
        )
        .fetch_all(self.run(&mut reader))
        .await?;
        drop(reader);
        if i64::try_from(rows.len()).is_ok_and(|count| count == BATCH) {
            done.next = rows.last().map(|row| row.id.clone());
        }
        let mut new: [Vec<Option<String>>; 5] = Default::default();
        for row in rows {
            let anew = |stored: &str| {
                let secret = self.sealer.open(stored, &row.id)?;
                Ok::<_, Unopened>(self.sealer.seal(secret.expose(), &row.id))
            };
            let secret = anew(&row.secret);
            let previous = row.previous_secret.as_deref().map(anew).transpose();
            if secret.is_err() || previous.is_err() {
                done.unopened.extend(SubscriptionId::parse(&row.id));
            }
            // Each of the two is sealed for itself, so that one that is lost does not keep the other in the clear.
            let secret = secret.unwrap_or_else(|_| row.secret.clone());
            let previous = previous.unwrap_or_else(|_| row.previous_secret.clone());
            let columns = [
                Some(row.id),
                Some(row.secret),
                row.previous_secret,
                Some(secret),
                previous,
            ];
            for (column, value) in new.iter_mut().zip(columns) {
                column.push(value);
            }
        }
        let [ids, old, old_previous, secret, previous] = new;
        if ids.is_empty() {
            return Ok(done);
        }
        let mut transaction = self.begin().await?;
        done.sealed = sqlx::query!(
            r#"
            UPDATE subscriptions s SET secret = r.secret, previous_secret = r.previous
            FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[])
                AS r(id, old, old_previous, secret, previous)
            WHERE s.id = r.id AND s.secret = r.old AND s.previous_secret IS NOT DISTINCT FROM r.old_previous
              AND (r.secret <> r.old OR r.previous IS DISTINCT FROM r.old_previous)
            "#,
            &ids as &[Option<String>],
            &old as &[Option<String>],
            &old_previous as &[Option<String>],
            &secret as &[Option<String>],
            &previous as &[Option<String>],
        )
        .execute(self.run(&mut transaction))
        .await?
        .rows_affected();
        transaction.commit().await?;
        Ok(done)
    }

    /// Erases former secrets that no longer sign, a bounded number of them. One that a rotation replaces meanwhile is left
    /// to the rotation.
    pub async fn erase_former_secrets(&self) -> Result<Erased, StoreError> {
        // Looked for first: an update, even of nothing, takes the counter row and makes every process read its view anew.
        let mut reader = self.own_reader().await?;
        let ids = sqlx::query_scalar!(
            r#"
            SELECT id FROM subscriptions
            WHERE previous_secret IS NOT NULL AND coalesce(previous_secret_until, 0) <= now_ms()
            ORDER BY id
            LIMIT $1
            "#,
            BATCH,
        )
        .fetch_all(self.run(&mut reader))
        .await?;
        drop(reader);
        if ids.is_empty() {
            return Ok(Erased { erased: 0, more: false });
        }
        let mut transaction = self.begin().await?;
        let erased = sqlx::query!(
            r#"
            UPDATE subscriptions SET previous_secret = NULL, previous_secret_until = NULL
            WHERE id = ANY($1) AND previous_secret IS NOT NULL AND coalesce(previous_secret_until, 0) <= now_ms()
            "#,
            &ids,
        )
        .execute(self.run(&mut transaction))
        .await?
        .rows_affected();
        transaction.commit().await?;
        Ok(Erased {
            erased,
            more: i64::try_from(ids.len()).is_ok_and(|count| count == BATCH),
        })
    }
}
