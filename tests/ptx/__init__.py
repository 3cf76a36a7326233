"""Executes compiled Triton kernels on a CPU: an emulator of the PTX that Triton makes for a GPU.

PTX is the assembly language that Triton hands to NVIDIA's assembler, ptxas. The kernels run from
there in bfloat16, float16 and float32, as compiled for sm_80 (mma, cp.async), sm_90 (wgmma) and
sm_120. What is not covered: ptxas itself, tcgen05 (sm_100), time.

    program.py       the text of the PTX -> instructions; runs the programs of a grid
    instructions.py  what each instruction does: arithmetic, conversions, loads and stores
    matrices.py      matrix units and what feeds them: mma, wgmma, ldmatrix, cp.async, fences
    memory.py        global and shared memory, with checks of bounds, alignment and races
    machine.py       registers and memory of a program that runs
    driver.py        stands in for the CUDA driver in Triton's launch path
    cases.py         runs every kind of call of the project, and prints its errors
    primitives.py    Triton's operations one by one, for the interpreter and the emulator
    mutations.py     breaks the PTX, and source_mutations.py the source of the kernels: what fails?

All threads of a program execute an instruction at once, as numpy arrays. On a GPU its warps run in
any order between two barriers. So a result that depends on that order would not be seen in the
values; memory.py finds it instead: two warps access the same place, one of them writes, and no
barrier is in between.

Source of the semantics: NVIDIA, "PTX ISA", 9.0.
"""
