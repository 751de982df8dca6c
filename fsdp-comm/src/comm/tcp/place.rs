//! The place of a process among those that were started together, as its launcher says.

use std::fmt::Display;
use std::net::IpAddr;
use std::str::FromStr;

use crate::comm::CommError;
use crate::comm::MAX_RANKS;

/// A rank that is a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub size: usize,
    /// Its number among the ranks of its machine: which GPU it takes.
    pub local_rank: usize,
    /// Where rank 0 listens: a name or an address, and a port.
    pub address: (String, u16),
}

/// Variables of rank, size and local rank, and who sets them.
const LAUNCHERS: [(&str, [&str; 3]); 3] = [
    ("fsdp launch or torchrun", ["RANK", "WORLD_SIZE", "LOCAL_RANK"]),
    ("srun", ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"]),
    ("mpirun", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"]),
];

impl Place {
    /// From the environment: `RANK`, `WORLD_SIZE` and `LOCAL_RANK` as `fsdp launch` and `torchrun` set them, or those of `srun` or Open
    /// MPI's `mpirun`; `MASTER_ADDR` and `MASTER_PORT` in any case. `FSDP_PORT` is taken for the port where it is set;
    /// where `torchrun` itself listens on the port (`TORCHELASTIC_USE_AGENT_STORE`), the next one is. Where `LOCAL_RANK` is
    /// not set it follows from `LOCAL_WORLD_SIZE`, or is the rank if `MASTER_ADDR` is a loopback address.
    ///
    /// # Errors
    /// [`CommError::Invalid`], which names the variable that is missing or wrong.
    pub fn from_env() -> Result<Place, CommError> {
        Place::from_variables(|name| std::env::var(name).ok()).map_err(|message| {
            // Which rank it is may be what is wrong.
            CommError::Invalid { rank: 0, message }
        })
    }

    /// The place of a process that a launcher has started as one rank of several, as [`Place::from_env`] reads it; `None` if none has:
    /// if no rank or no `MASTER_ADDR` is set. A batch script of Slurm has a rank, for instance, but is none.
    ///
    /// # Errors
    /// As for [`Place::from_env`].
    pub fn launched() -> Result<Option<Place>, CommError> {
        let is_set = |name: &str| std::env::var_os(name).is_some();
        let is_rank = LAUNCHERS.iter().any(|(_, [rank, ..])| is_set(rank)) && is_set("MASTER_ADDR");
        is_rank.then(Place::from_env).transpose()
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Place, String> {
        let known = LAUNCHERS.iter().find(|(_, names)| variable(names[0]).is_some());
        let Some((launcher, [rank, size, local_rank])) = known else {
            let names = LAUNCHERS.map(|(launcher, names)| format!("{} ({launcher})", names[0])).join(", ");
            return Err(format!("the rank is not known: none of {names} is set"));
        };
        let required = |name: &str, what: &str| {
            variable(name).ok_or_else(|| format!("{name} is not set: {what}, started by {launcher}"))
        };
        let rank: usize = parse(rank, &required(rank, "this rank")?)?;
        let (size_name, size) = (size, parse(size, &required(size, "the number of ranks")?)?);
        let local = variable(local_rank).map_or_else(
            || local_rank_of(rank, &variable, local_rank, launcher),
            |text| parse(local_rank, &text),
        );
        let local_rank = local?;
        if size > MAX_RANKS {
            return Err(format!("{size_name} is {size}: {MAX_RANKS} ranks are the most"));
        }
        if rank >= size {
            return Err(format!("rank {rank} is none of the {size} ranks that {size_name} says"));
        }
        let host = required("MASTER_ADDR", "name or address of rank 0's machine")?;
        let port = match variable("FSDP_PORT") {
            Some(port) => parse("FSDP_PORT", &port)?,
            None => {
                let port: u16 =
                    parse("MASTER_PORT", &required("MASTER_PORT", "a free port of rank 0's machine")?)?;
                let taken = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
                if taken { port.wrapping_add(1) } else { port }
            }
        };
        Ok(Place { rank, size, local_rank, address: (host, port) })
    }
}

/// The local rank where only the rank is told, if there is one answer.
fn local_rank_of(
    rank: usize,
    variable: &impl Fn(&str) -> Option<String>,
    name: &str,
    launcher: &str,
) -> Result<usize, String> {
    if let Some(ranks) = variable("LOCAL_WORLD_SIZE") {
        let ranks: usize = parse("LOCAL_WORLD_SIZE", &ranks)?;
        return rank.checked_rem(ranks).ok_or_else(|| "LOCAL_WORLD_SIZE is 0".to_owned());
    }
    let host = variable("MASTER_ADDR").unwrap_or_default();
    if host == "localhost" || host.parse().is_ok_and(|address: IpAddr| address.is_loopback()) {
        // All ranks are on the machine of rank 0.
        return Ok(rank);
    }
    Err(format!(
        "{name} is not set: the rank on its machine, as {launcher} starts it; set it, or LOCAL_WORLD_SIZE (as many ranks on \
         every machine), or MASTER_ADDR=localhost if all are on one"
    ))
}

fn parse<T: FromStr<Err: Display>>(name: &str, text: &str) -> Result<T, String> {
    text.trim().parse().map_err(|error| format!("{name} is `{text}`: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(variables: &[(&str, &str)]) -> Result<Place, String> {
        Place::from_variables(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    const ADDRESS: [(&str, &str); 2] = [("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];

    #[test]
    fn launchers_are_known_by_their_variables() {
        for (_, [rank, size, local_rank]) in LAUNCHERS {
            let own = [(rank, "5"), (size, "8"), (local_rank, "1")];
            let address = ("node0".to_owned(), 29500);
            let expected = Place { rank: 5, size: 8, local_rank: 1, address };
            assert_eq!(place(&[&own[..], &ADDRESS].concat()), Ok(expected));
        }
    }

    #[test]
    fn a_local_rank_that_can_be_known_need_not_be_set() {
        let own = [("RANK", "5"), ("WORLD_SIZE", "8"), ("MASTER_PORT", "29500")];
        let local = |more: &[(&str, &str)]| place(&[&own[..], more].concat()).map(|place| place.local_rank);
        for host in ["localhost", "127.0.0.1", "::1", "127.0.1.1"] {
            assert_eq!(local(&[("MASTER_ADDR", host)]), Ok(5), "{host}");
        }
        assert_eq!(local(&[("MASTER_ADDR", "node0"), ("LOCAL_WORLD_SIZE", "4")]), Ok(1));
        assert_eq!(local(&[("MASTER_ADDR", "localhost"), ("LOCAL_RANK", "2")]), Ok(2));
        let message = local(&[("MASTER_ADDR", "node0")]).unwrap_err();
        assert!(
            message.starts_with("LOCAL_RANK is not set: ") && message.contains("LOCAL_WORLD_SIZE"),
            "{message}"
        );
        assert_eq!(local(&[("LOCAL_WORLD_SIZE", "0")]), Err("LOCAL_WORLD_SIZE is 0".to_owned()));
    }

    #[test]
    fn a_port_that_is_taken_is_not() {
        let own = [("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")];
        let port =
            |more: &[(&str, &str)]| place(&[&own[..], &ADDRESS, more].concat()).map(|place| place.address.1);
        assert_eq!(port(&[("TORCHELASTIC_USE_AGENT_STORE", "True")]), Ok(29501));
        assert_eq!(port(&[("TORCHELASTIC_USE_AGENT_STORE", "True"), ("FSDP_PORT", "4000")]), Ok(4000));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        let cases: [(&[(&str, &str)], &str); 6] = [
            (
                &[],
                "none of RANK (fsdp launch or torchrun), SLURM_PROCID (srun), OMPI_COMM_WORLD_RANK (mpirun) is set",
            ),
            (
                &[("RANK", "1")],
                "WORLD_SIZE is not set: the number of ranks, started by fsdp launch or torchrun",
            ),
            (&[("RANK", "one")], "RANK is `one`: invalid digit found in string"),
            (&[("RANK", "2"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")], "rank 2 is none of the 2 ranks"),
            (&[("RANK", "2"), ("WORLD_SIZE", "4000"), ("LOCAL_RANK", "0")], "2048 ranks are the most"),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")],
                "MASTER_ADDR is not set: name or address",
            ),
        ];
        for (variables, words) in cases {
            let message = place(variables).unwrap_err();
            assert!(message.contains(words), "{message}");
        }
    }
}
