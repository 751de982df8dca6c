//! The secret of a run, which only its ranks know.
//!
//! Both sides of a connection prove first that they know the secret, by HMAC-SHA-256 over random numbers of both sides. The
//! secret itself never goes over the wire. Later messages are neither signed nor encrypted: they need a network that others
//! cannot write to.

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

/// The variable that holds a run's secret.
pub(super) const TOKEN: &str = "FSDP_TOKEN";

/// What the ranks of a run know.
#[derive(Clone)]
pub(super) struct Secret {
    key: [u8; 32],
    /// Where it comes from.
    source: Source,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Source {
    Token,
    /// The variables that name the job.
    Job(String),
    /// There is none: all ranks are on one machine.
    Nothing,
}

/// A number that is drawn for one connection.
pub(super) type Nonce = [u8; 16];
/// Shows that a side knows the secret.
pub(super) type Proof = [u8; 32];

/// Who proves something: what one side says is of no use to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Server,
    Rank { rank: u32, size: u32 },
}

impl Secret {
    /// That of this run: `FSDP_TOKEN`, or what names the job, or none if the ranks are on one machine (`is_local`).
    pub(super) fn from_env(is_local: bool) -> Result<Secret, String> {
        Secret::from_variables(|name| std::env::var(name).ok(), is_local)
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>, is_local: bool) -> Result<Secret, String> {
        let of = |text: &str, source| Secret { key: Sha256::digest(text.as_bytes()).into(), source };
        if let Some(token) = variable(TOKEN).filter(|token| !token.trim().is_empty()) {
            return Ok(of(&format!("token {token}"), Source::Token));
        }
        // Without a name of its own `torchrun` calls every job `none`.
        if let Some(id) = variable("TORCHELASTIC_RUN_ID").filter(|id| !id.is_empty() && id != "none") {
            return Ok(of(&format!("torchrun {id}"), Source::Job("TORCHELASTIC_RUN_ID".to_owned())));
        }
        if let Some(job) = variable("SLURM_JOB_ID").filter(|job| !job.is_empty()) {
            let step = variable("SLURM_STEP_ID").unwrap_or_default();
            let source = Source::Job("SLURM_JOB_ID and SLURM_STEP_ID".to_owned());
            return Ok(of(&format!("slurm {job}.{step}"), source));
        }
        if is_local {
            return Ok(of("", Source::Nothing));
        }
        Err(format!(
            "{TOKEN} is not set: ranks on several machines must share a secret, or anyone who reaches the port could be one \
             of them. Set it to the same random text for all ranks, as by `export {TOKEN}=$(openssl rand -hex 32)` where \
             the launcher is started (`mpirun -x {TOKEN}`), or name the job (`torchrun --rdzv-id`)"
        ))
    }

    /// What a user should know of it.
    pub(super) fn warning(&self) -> Option<String> {
        match &self.source {
            Source::Job(variables) => Some(format!(
                "ranks know each other by {variables}, which others may know too; {TOKEN} sets a secret"
            )),
            Source::Token | Source::Nothing => None,
        }
    }

    /// What `side` answers to the number of the `other` side, having drawn its `own`.
    pub(super) fn proof(&self, side: Side, own: Nonce, other: Nonce) -> Proof {
        self.code(side, own, other).finalize().into_bytes().into()
    }

    /// Whether a proof is that one, in a time that does not tell where it differs.
    pub(super) fn accepts(&self, proof: &Proof, side: Side, own: Nonce, other: Nonce) -> bool {
        self.code(side, own, other).verify_slice(proof).is_ok()
    }

    fn code(&self, side: Side, own: Nonce, other: Nonce) -> Hmac<Sha256> {
        let (name, rank, size) = match side {
            Side::Server => (*b"server", 0, 0),
            Side::Rank { rank, size } => (*b"rank..", rank, size),
        };
        self.hmac(&[&name, &own, &other, &rank.to_le_bytes(), &size.to_le_bytes()])
    }

    fn hmac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let code = Hmac::new_from_slice(&self.key).expect("a key may have any length");
        parts.iter().fold(code, |code, part| code.chain_update(part))
    }
}

/// A number that nobody foresees.
///
/// # Errors
/// The system has no random numbers.
pub(super) fn nonce() -> Result<Nonce, std::io::Error> {
    let mut nonce = Nonce::default();
    getrandom::fill(&mut nonce)?;
    Ok(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(variables: &[(&str, &str)], is_local: bool) -> Result<Secret, String> {
        let of = |name: &str| variables.iter().find(|(known, _)| *known == name);
        Secret::from_variables(|name| of(name).map(|(_, value)| (*value).to_owned()), is_local)
    }

    #[test]
    fn the_hash_is_that_of_rfc_4231() {
        // Test case 2, whose key is shorter than a block: padded with zeros it is the same.
        let mut key = [0; 32];
        key[..4].copy_from_slice(b"Jefe");
        let secret = Secret { key, source: Source::Token };
        let hash: Proof = secret.hmac(&[b"what do ya want ", b"for nothing?"]).finalize().into_bytes().into();
        let hash = hash.map(|byte| format!("{byte:02x}")).concat();
        assert_eq!(hash, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }

    #[test]
    fn a_proof_is_of_one_side_one_rank_and_one_connection() {
        let secret = secret(&[(TOKEN, "a")], false).unwrap();
        let (one, other) = ([1; 16], [2; 16]);
        let rank = |rank, size| Side::Rank { rank, size };
        let proof = secret.proof(rank(1, 2), one, other);
        assert!(secret.accepts(&proof, rank(1, 2), one, other));
        for wrong in [
            secret.proof(Side::Server, one, other),
            secret.proof(rank(0, 2), one, other),
            secret.proof(rank(1, 3), one, other),
            secret.proof(rank(1, 2), other, one),
            secret.proof(rank(1, 2), one, [3; 16]),
            self::secret(&[(TOKEN, "b")], false).unwrap().proof(rank(1, 2), one, other),
        ] {
            assert_ne!(proof, wrong);
            assert!(!secret.accepts(&wrong, rank(1, 2), one, other));
        }
        assert_ne!(nonce().unwrap(), nonce().unwrap());
    }

    #[test]
    fn a_job_has_its_name_for_a_secret_and_says_so() {
        let job = [("SLURM_JOB_ID", "7"), ("SLURM_STEP_ID", "0")];
        let told = |variables: &[_]| secret(variables, false).unwrap().warning();
        assert!(told(&job).is_some_and(|text| text.contains("SLURM_JOB_ID and SLURM_STEP_ID")));
        assert!(
            told(&[("TORCHELASTIC_RUN_ID", "run7")]).is_some_and(|text| text.contains("TORCHELASTIC_RUN_ID"))
        );
        assert_eq!(told(&[(TOKEN, "a"), job[0]]), None);
        let key = |variables: &[_]| secret(variables, true).unwrap().key;
        assert_ne!(key(&job), key(&[job[0], ("SLURM_STEP_ID", "1")]));
    }

    #[test]
    fn ranks_on_several_machines_need_one() {
        let none: [&[(&str, &str)]; 3] = [&[], &[("TORCHELASTIC_RUN_ID", "none")], &[(TOKEN, " ")]];
        for variables in none {
            let message = secret(variables, false).err().unwrap();
            assert!(
                message.starts_with("FSDP_TOKEN is not set: ") && message.contains("openssl rand"),
                "{message}"
            );
            assert_eq!(secret(variables, true).unwrap().warning(), None);
        }
    }
}
