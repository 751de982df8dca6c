//! Builds the kernels for the host where the feature `host` asks for it and a C++ compiler is found.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(host_kernels)");
    #[cfg(feature = "host")]
    host::build();
}

#[cfg(feature = "host")]
mod host {
    use std::path::PathBuf;
    use std::{env, fs};

    /// Set to anything, it makes a missing compiler an error.
    const REQUIRED: &str = "FSDP_REQUIRE_HOST_KERNELS";

    pub fn build() {
        for path in ["kernels", "host"] {
            println!("cargo::rerun-if-changed={path}");
        }
        println!("cargo::rerun-if-env-changed={REQUIRED}");
        if let Err(reason) = probe() {
            if env::var_os(REQUIRED).is_some() {
                panic!("{REQUIRED} is set, but {reason}");
            }
            println!("cargo::warning=the CUDA kernels are not checked on the host: {reason}");
            return;
        }
        // Products and sums are compiled apart, as for the device, so that both give the same bits.
        compiler()
            .files(["host/kernels.cpp", "host/emulation.cpp"])
            .opt_level(1)
            .flag("-ffp-contract=off")
            .flag("-fno-strict-aliasing")
            // It takes jumps between stacks for an error.
            .flag("-U_FORTIFY_SOURCE")
            .warnings(true)
            .extra_warnings(true)
            .warnings_into_errors(true)
            .compile("fsdp_kernels_host");
        println!("cargo::rustc-cfg=host_kernels");
    }

    fn compiler() -> cc::Build {
        let mut build = cc::Build::new();
        build.cpp(true).std("c++17");
        build
    }

    /// Fails with a reason unless the target is one that the emulation works on, and a C++ compiler compiles for it.
    fn probe() -> Result<(), String> {
        let target = |key: &str| env::var(format!("CARGO_CFG_TARGET_{key}")).unwrap_or_default();
        if target("OS") != "linux" || target("ENV") != "gnu" {
            return Err("their emulation needs Linux with glibc".into());
        }
        let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
        let source = out.join("probe.cpp");
        fs::write(&source, "#include <vector>\n#include <ucontext.h>\n")
            .map_err(|error| error.to_string())?;
        let missing = "no C++17 compiler works (install g++, or set CXX)";
        let tool = compiler().try_get_compiler().map_err(|error| format!("{missing}: {error}"))?;
        let output = tool
            .to_command()
            .arg("-c")
            .arg(&source)
            .arg("-o")
            .arg(out.join("probe.o"))
            .output()
            .map_err(|error| format!("{missing}: {} does not start: {error}", tool.path().display()))?;
        if !output.status.success() {
            return Err(format!("{missing}: {} fails on a test program", tool.path().display()));
        }
        Ok(())
    }
}
