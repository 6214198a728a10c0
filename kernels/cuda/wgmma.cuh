// wgmma.mma_async m64nNk16 for every N from 8 to 256: D[64,N] (+)= A[64,16] · B[N,16]ᵀ, both operands in
// shared memory. `keep` 0 overwrites D. R<n> lists the names of n registers, F<n> binds them; both grow
// by four, so that each N needs one line at the end.
#pragma once

#if BF16
#define WGMMA_TYPES ".f32.bf16.bf16"
#else
#define WGMMA_TYPES ".f32.f16.f16"
#endif

#define R4 "%0,%1,%2,%3"
#define R8 R4 ",%4,%5,%6,%7"
#define R12 R8 ",%8,%9,%10,%11"
#define R16 R12 ",%12,%13,%14,%15"
#define R20 R16 ",%16,%17,%18,%19"
#define R24 R20 ",%20,%21,%22,%23"
#define R28 R24 ",%24,%25,%26,%27"
#define R32 R28 ",%28,%29,%30,%31"
#define R36 R32 ",%32,%33,%34,%35"
#define R40 R36 ",%36,%37,%38,%39"
#define R44 R40 ",%40,%41,%42,%43"
#define R48 R44 ",%44,%45,%46,%47"
#define R52 R48 ",%48,%49,%50,%51"
#define R56 R52 ",%52,%53,%54,%55"
#define R60 R56 ",%56,%57,%58,%59"
#define R64 R60 ",%60,%61,%62,%63"
#define R68 R64 ",%64,%65,%66,%67"
#define R72 R68 ",%68,%69,%70,%71"
#define R76 R72 ",%72,%73,%74,%75"
#define R80 R76 ",%76,%77,%78,%79"
#define R84 R80 ",%80,%81,%82,%83"
#define R88 R84 ",%84,%85,%86,%87"
#define R92 R88 ",%88,%89,%90,%91"
#define R96 R92 ",%92,%93,%94,%95"
#define R100 R96 ",%96,%97,%98,%99"
#define R104 R100 ",%100,%101,%102,%103"
#define R108 R104 ",%104,%105,%106,%107"
#define R112 R108 ",%108,%109,%110,%111"
#define R116 R112 ",%112,%113,%114,%115"
#define R120 R116 ",%116,%117,%118,%119"
#define R124 R120 ",%120,%121,%122,%123"
#define R128 R124 ",%124,%125,%126,%127"
#define F4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define F8 F4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define F12 F8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define F16 F12, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define F20 F16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define F24 F20, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define F28 F24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define F32 F28, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define F36 F32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define F40 F36, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define F44 F40, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define F48 F44, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define F52 F48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define F56 F52, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define F60 F56, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define F64 F60, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define F68 F64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define F72 F68, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define F76 F72, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define F80 F76, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define F84 F80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define F88 F84, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define F92 F88, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define F96 F92, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define F100 F96, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define F104 F100, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define F108 F104, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define F112 F108, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define F116 F112, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define F120 F116, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define F124 F120, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define F128 F124, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

template <int N>
struct Wgmma;

#define WGMMA(N, REGISTERS, BINDINGS, A, B, KEEP)                                                      \
    template <>                                                                                        \
    struct Wgmma<N> {                                                                                  \
        static __device__ __forceinline__ void run(float (&d)[N / 2], u64 a, u64 b, int keep) {        \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #KEEP ", 0;\n"                           \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES " {" REGISTERS       \
                         "}, %" #A ", %" #B ", p, 1, 1, 0, 0;\n}\n"                                    \
                         : BINDINGS                                                                    \
                         : "l"(a), "l"(b), "r"(keep));                                                 \
        }                                                                                              \
    };

WGMMA(8, R4, F4, 4, 5, 6)
WGMMA(16, R8, F8, 8, 9, 10)
WGMMA(24, R12, F12, 12, 13, 14)
WGMMA(32, R16, F16, 16, 17, 18)
WGMMA(40, R20, F20, 20, 21, 22)
WGMMA(48, R24, F24, 24, 25, 26)
WGMMA(56, R28, F28, 28, 29, 30)
WGMMA(64, R32, F32, 32, 33, 34)
WGMMA(72, R36, F36, 36, 37, 38)
WGMMA(80, R40, F40, 40, 41, 42)
WGMMA(88, R44, F44, 44, 45, 46)
WGMMA(96, R48, F48, 48, 49, 50)
WGMMA(104, R52, F52, 52, 53, 54)
WGMMA(112, R56, F56, 56, 57, 58)
WGMMA(120, R60, F60, 60, 61, 62)
WGMMA(128, R64, F64, 64, 65, 66)
WGMMA(136, R68, F68, 68, 69, 70)
WGMMA(144, R72, F72, 72, 73, 74)
WGMMA(152, R76, F76, 76, 77, 78)
WGMMA(160, R80, F80, 80, 81, 82)
WGMMA(168, R84, F84, 84, 85, 86)
WGMMA(176, R88, F88, 88, 89, 90)
WGMMA(184, R92, F92, 92, 93, 94)
WGMMA(192, R96, F96, 96, 97, 98)
WGMMA(200, R100, F100, 100, 101, 102)
WGMMA(208, R104, F104, 104, 105, 106)
WGMMA(216, R108, F108, 108, 109, 110)
WGMMA(224, R112, F112, 112, 113, 114)
WGMMA(232, R116, F116, 116, 117, 118)
WGMMA(240, R120, F120, 120, 121, 122)
WGMMA(248, R124, F124, 124, 125, 126)
WGMMA(256, R128, F128, 128, 129, 130)
