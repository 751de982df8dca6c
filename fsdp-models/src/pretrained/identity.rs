//! The identity of a pretrained model, which tells it apart from others of one architecture.

use super::weights::Weights;
use super::{Identity, Pretrained};
use crate::config::LlamaConfig;

/// Elements read at a time: a multiple of every block size.
const CHUNK: usize = 1 << 20;

impl Pretrained {
    /// What tells this model apart from others. All its weights are read for it, a piece at a time: an adapter trained beside one
    /// model is worth nothing beside another, however few of its weights differ. No rank has to do it together with others.
    ///
    /// # Errors
    /// A failed read.
    pub fn identity(&self) -> crate::Result<Identity> {
        let mut crc = crc32fast::Hasher::new();
        // What says the same in other words is the same, and how weights were drawn once is no part of the model.
        let head_dim = Some(self.config.head_dim());
        let config = LlamaConfig { head_dim, initializer_range: 0.0, ..self.config.clone() };
        let config = serde_json::to_string(&config).expect("a configuration is plain data");
        crc.update(config.as_bytes());
        for tensor in self.weights.found() {
            let dtype = self.weights.dtype(tensor.name).unwrap_or_default();
            crc.update(format!("\n{} {dtype} {:?}\n", tensor.name, tensor.shape).as_bytes());
            let elements: usize = tensor.shape.iter().product();
            for start in (0..elements).step_by(CHUNK) {
                let len = CHUNK.min(elements - start);
                crc.update(&self.weights.stored_bytes(tensor.name, start, len)?);
            }
        }
        let name = self.path.display().to_string();
        Ok(Identity { name, fingerprint: format!("{:08x}", crc.finalize()) })
    }
}

impl Weights {
    /// Elements of a tensor as they are in the file, in whole blocks; none of a dtype that no weight can have.
    fn stored_bytes(&self, name: &str, start: usize, len: usize) -> crate::Result<Vec<u8>> {
        match self {
            Weights::Gguf(file) => Ok(file.read_blocks(name, start, len)?),
            Weights::Single(_) | Weights::Sharded(_) => {
                let file = self.file_of(name).filter(|file| file.dtype(name).is_some());
                Ok(file.map(|file| file.read_range_bytes(name, start, len)).transpose()?.unwrap_or_default())
            }
        }
    }
}
